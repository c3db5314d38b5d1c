"""What several kinds of layers share."""
