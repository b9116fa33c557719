"""What a parameter is and which part of it a rank holds."""
