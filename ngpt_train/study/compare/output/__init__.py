"""The report as people read it: report.md, figures, and one page that needs no network."""
