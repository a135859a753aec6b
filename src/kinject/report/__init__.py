"""The report of an evaluation or a study: words, tables, figures, page. Matplotlib and jinja2 are
imported where needed."""
