"""Every page, table and figure: the reports of an evaluation, a study, a training and an augmentation.

Importing this loads neither matplotlib nor jinja2 nor torch: they are imported where they are needed.
"""
