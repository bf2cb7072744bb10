"""The server of the tool."""

import verifiers.v1 as vf


class AddToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


if __name__ == "__main__":
    AddToolset.run()
