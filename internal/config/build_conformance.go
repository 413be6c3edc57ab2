//go:build conformance

package config

import "errors"

// buildSettings are those of programs built for the MCP conformance suite.
var buildSettings = []setting{{name: "conformance-fixtures", group: groupAccess, def: "",
	help: "true: /mcp has what the MCP conformance suite wants to find there.",
	set: func(c *Config, value string) error {
		if value != "" && value != "true" {
			return errors.New("must be true")
		}
		c.ConformanceFixtures = value == "true"
		return nil
	}}}
