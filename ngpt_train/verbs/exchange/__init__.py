"""The verbs `export` and `import`."""
