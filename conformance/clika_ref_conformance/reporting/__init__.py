"""What a run leaves behind: JSON, JUnit XML, an HTML matrix, reproducers."""
