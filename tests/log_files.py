"""Log files that compilations and exports of a test write."""


def read_logs(folder):
    """Return the text of all logs in a folder."""
    return "".join(log.read_text() for log in folder.glob("*.log"))
