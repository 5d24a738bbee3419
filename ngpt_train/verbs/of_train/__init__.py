"""What `train` says, and how it goes back."""
