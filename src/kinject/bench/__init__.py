"""`kinject bench`: training strategies measured side by side."""
