package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"

	"fleetd/internal/apiclient"
)

type devicesCmd struct {
	List    devicesListCmd `cmd:"" default:"withargs" help:"List the devices (the default)."`
	Approve approveCmd     `cmd:"" help:"Admit a waiting device, or the waiting client id of a known one."`
	Revoke  revokeCmd      `cmd:"" help:"Make a device's credentials worthless; it waits for approval from its next OTA check on."`
	Forget  forgetCmd      `cmd:"" help:"Remove a device and make its credentials worthless."`
	Rotate  rotateCmd      `cmd:"" help:"Give a device, or all, new credentials at the next OTA check; the old ones stay valid meanwhile."`
	Keys    keysCmd        `cmd:"" help:"The list of chips whose hardware proves itself: import, list or remove keys."`
}

type devicesListCmd struct {
	State     string `help:"Only devices that are online, offline, pending or contested." placeholder:"STATE"`
	Transport string `help:"Only devices on this transport." placeholder:"NAME"`
	Board     string `help:"Only devices with this board." placeholder:"NAME"`
	Firmware  string `help:"Only devices with this firmware version." placeholder:"VERSION"`
	Label     string `help:"Only devices with this label." placeholder:"KEY[=VALUE]"`
	Search    string `help:"Only devices with this text in their name or id." placeholder:"TEXT"`
	JSON      bool   `name:"json" help:"Print the server's JSON, one device per line."`
	Watch     bool   `help:"Print again whenever something changes."`
	clientFlags
}

// Run prints the devices, once or until interrupted.
func (d *devicesListCmd) Run(ctx context.Context, a *app) error {
	c, err := d.client(a)
	if err != nil {
		return err
	}
	var shown []byte
	for {
		current, err := d.render(ctx, a, c)
		if err != nil {
			if d.Watch && ctx.Err() != nil {
				return nil
			}
			return err
		}
		if !bytes.Equal(current, shown) {
			if shown != nil && !d.JSON {
				fmt.Fprintln(a.stdout)
			}
			if _, err := a.stdout.Write(current); err != nil {
				return failed("write: %w", err)
			}
			shown = current
		}
		if !d.Watch {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(a.refresh):
		}
	}
}

// render writes all devices into memory, so that a watcher can tell whether anything changed.
func (d *devicesListCmd) render(ctx context.Context, a *app, c *apiclient.Client) ([]byte, error) {
	filter := apiclient.DeviceFilter{State: d.State, Transport: d.Transport, Board: d.Board, Firmware: d.Firmware, Label: d.Label, Text: d.Search}
	var out bytes.Buffer
	rows := [][]string{{"ID", "NAME", "STATE", "TRANSPORT", "BOARD", "FIRMWARE", "TOOLS", "LAST SEEN"}}
	for device, err := range c.Devices(ctx, filter) {
		if err != nil {
			return nil, err
		}
		if d.JSON {
			if err := printJSONLine(&out, device.Raw); err != nil {
				return nil, err
			}
			continue
		}
		row := []string{device.ID, device.Name, device.State, device.Transport, device.Board, device.Firmware, toolsCell(device), d.seenCell(device, a.now())}
		for i, cell := range row {
			row[i] = cmp.Or(cell, "-")
		}
		rows = append(rows, row)
	}
	switch {
	case d.JSON:
		return out.Bytes(), nil
	case len(rows) == 1 && filter == (apiclient.DeviceFilter{}):
		return []byte("no devices yet; `fleetd doctor` shows the OTA URL to type into one\n"), nil
	case len(rows) == 1:
		return []byte("no such devices\n"), nil
	}
	if err := table(&out, "", rows); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// toolsCell is the number of tools, and why it may not be right.
func toolsCell(d apiclient.Device) string {
	switch d.MCP.CatalogState {
	case "ready":
	case "stale":
		return strconv.Itoa(d.MCP.Tools) + " (stale)"
	default:
		return cmp.Or(d.MCP.State, d.MCP.CatalogState)
	}
	if d.MCP.Partial {
		return strconv.Itoa(d.MCP.Tools) + " (partial)"
	}
	return strconv.Itoa(d.MCP.Tools)
}

// seenCell is when the device was last heard. A watcher gets the time itself: an age would change at every look.
func (d *devicesListCmd) seenCell(device apiclient.Device, now time.Time) string {
	switch {
	case device.State == "online":
		return "now"
	case d.Watch && !device.LastSeen.IsZero():
		return device.LastSeen.UTC().Format(time.RFC3339)
	}
	return ago(device.LastSeen, now)
}

type approveCmd struct {
	Device string `arg:"" help:"Device id, or the six-digit code that the device speaks."`
	clientFlags
}

// Run approves.
func (cmd *approveCmd) Run(ctx context.Context, a *app) error {
	return a.change(ctx, cmd.clientFlags, (*apiclient.Client).Approve, cmd.Device, "approved; it takes effect at its next OTA check")
}

type revokeCmd struct {
	Device string `arg:"" help:"Device id."`
	clientFlags
}

// Run revokes.
func (cmd *revokeCmd) Run(ctx context.Context, a *app) error {
	return a.change(ctx, cmd.clientFlags, (*apiclient.Client).Revoke, cmd.Device, "revoked; it waits for approval from its next OTA check on")
}

type forgetCmd struct {
	Device string `arg:"" help:"Device id."`
	clientFlags
}

// Run forgets.
func (cmd *forgetCmd) Run(ctx context.Context, a *app) error {
	return a.change(ctx, cmd.clientFlags, (*apiclient.Client).Forget, cmd.Device, "forgotten")
}

// change does one thing to one device and says so.
func (a *app) change(ctx context.Context, flags clientFlags, do func(*apiclient.Client, context.Context, string) error, device, done string) error {
	c, err := flags.client(a)
	if err != nil {
		return err
	}
	if err := do(c, ctx, device); err != nil {
		return err
	}
	fmt.Fprintf(a.stdout, "%s %s\n", oneLine(device), done)
	return nil
}
