"""What helps before and around a run: techniques side by side, a plan, finders, the doctor, the recipes' schema."""
