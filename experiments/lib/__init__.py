"""What the experiment scripts share."""
