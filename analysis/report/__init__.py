"""The report of a study: one page that works offline, its figures and their numbers, and a summary in Markdown."""
