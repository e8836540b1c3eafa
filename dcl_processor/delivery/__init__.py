"""The three orders in which the stages follow each other, and what they share."""
