"""Training from texts, which are tokenised while the run trains, into the file that `deepy data tokenize` makes."""
