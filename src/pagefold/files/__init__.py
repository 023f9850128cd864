"""Files: whole ones or none, private ones, JSON, and which of a model's folder are its weights."""
