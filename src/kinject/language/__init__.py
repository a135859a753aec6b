"""What kinject knows of languages: which one a text is in, its families of scripts, its words for numbers, dates and units."""
