"""Where documents come from: files of this machine, the hub, and how a file is read."""
