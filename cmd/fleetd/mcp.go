package main

import (
	"context"
	"fmt"
	"os"

	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

type mcpCmd struct {
	Device string `device:"name" help:"Offer the tools of this device under their own names, instead of the fleet's." placeholder:"DEVICE"`
	clientFlags
}

// Run carries MCP between standard input and output and a node until the input ends.
func (m *mcpCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	note := func(err error) { fmt.Fprintln(a.stderr, "fleetd: "+cleantext.Line(err.Error())) }
	return c.BridgeMCP(ctx, apiclient.MCPPath(m.Device), os.Stdin, a.stdout, note)
}
