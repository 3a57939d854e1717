"""What is done with the distributions before anybody gets them: built, installed where nothing is, tried there."""
