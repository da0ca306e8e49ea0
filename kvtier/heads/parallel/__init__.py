"""Head profiles for tensor parallel ranks."""
