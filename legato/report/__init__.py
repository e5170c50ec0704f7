"""Floor 1: timelines and plans as pictures, a self-contained HTML page and a Chrome trace."""
