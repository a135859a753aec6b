"""`kinject export`: a finished run as a model folder, ready to serve or publish."""
