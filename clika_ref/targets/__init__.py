"""Facts that targets and the stages that call them share: the CPU, sizes in the data, suffixes of files."""
