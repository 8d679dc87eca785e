"""What a user would write instead: small and fair, with the libraries at hand and nothing from `lib` but the data."""
