"""Text and files that people have, read into records. No torch here."""
