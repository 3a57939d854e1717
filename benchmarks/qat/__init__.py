"""One step of training in integers beside one in float and beside peers, in one run."""
