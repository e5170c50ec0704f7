"""How far results are from what they are compared with, as a table; for test files that are also run as scripts."""


def show_gaps(title, gaps, *, exact=1e-7):
    """Print, for each name, how many of its relative gaps are (nearly) none, and their mean and worst."""
    print(f"{title:28}{'none':>9}{'mean':>8}{'worst':>8}")
    for name, these in gaps.items():
        none = sum(gap < exact for gap in these) / len(these)
        print(f"{name:28}{none:9.1%}{sum(these) / len(these):8.1%}{max(these):8.1%}")
