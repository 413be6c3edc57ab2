package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/csv"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
)

type devicesCmd struct {
	List    devicesListCmd `cmd:"" default:"withargs" help:"List the devices (the default)."`
	Show    showCmd        `cmd:"" help:"Show everything about one device."`
	Edit    editCmd        `cmd:"" help:"Change the name of a device, or labels and transport of one or of a selection."`
	Import  importCmd      `cmd:"" help:"Add devices, or change them, from a CSV or NDJSON file."`
	Export  exportCmd      `cmd:"" help:"Write devices to a CSV or NDJSON file."`
	Approve approveCmd     `cmd:"" help:"Admit a device that waits for approval, or a client that waits under the id of a known device."`
	Refuse  refuseCmd      `cmd:"" help:"Refuse a client that waits under the id of a device; the device keeps its credentials and its connection."`
	Revoke  revokeCmd      `cmd:"" help:"Invalidate a device's credentials; from its next OTA check on the device waits for approval."`
	Forget  forgetCmd      `cmd:"" help:"Remove a device and invalidate its credentials."`
	Rotate  rotateCmd      `cmd:"" help:"Give one device, or all, new credentials at the next OTA check; the old credentials stay valid for a time."`
}

type devicesListCmd struct {
	Select    string `arg:"" optional:"" name:"select" help:"Only devices of this selection, such as 'room=lab,firmware<2.4'; a word alone selects the devices with that label."`
	Sort      string `help:"Order: id, name, last_seen or offline_since. last_seen and offline_since list only devices that are offline." default:"id" enum:"id,name,last_seen,offline_since"`
	State     string `help:"Only devices that are online, offline, pending or contested." placeholder:"STATE" values:"online,offline,pending,contested"`
	Transport string `help:"Only devices on this transport." placeholder:"NAME" values:"mqtt,websocket"`
	Board     string `help:"Only devices with this board." placeholder:"NAME"`
	Firmware  string `help:"Only devices with this firmware version." placeholder:"VERSION"`
	Label     string `help:"Only devices with this label." placeholder:"KEY[=VALUE]"`
	Search    string `help:"Only devices with this text in their name, id or board." placeholder:"TEXT"`
	JSON      bool   `name:"json" help:"Print the server's JSON, one device per line." xor:"format"`
	CSV       bool   `name:"csv" help:"Print CSV with a header." xor:"format"`
	Limit     int    `help:"Print only the first N." placeholder:"N"`
	Watch     bool   `help:"Print the list again whenever it changes."`
	clientFlags
}

// Run prints the devices, once or until interrupted.
func (d *devicesListCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if !d.Watch && (d.JSON || d.CSV) {
		// These formats have no column widths, so devices are written as they arrive and a large fleet is never in memory.
		out := bufio.NewWriter(a.stdout)
		err := d.write(ctx, a, c, out)
		if flushErr := out.Flush(); err == nil && flushErr != nil {
			err = failed("write: %w", flushErr)
		}
		return err
	}
	return a.look(ctx, d.Watch, !d.JSON && !d.CSV, func(out io.Writer) error { return d.write(ctx, a, c, out) })
}

// look prints the output of write. With watch it calls write again and again until ctx ends, and prints the output when it
// has changed, after a blank line if separate is true.
func (a *app) look(ctx context.Context, watch, separate bool, write func(io.Writer) error) error {
	var shown []byte
	for {
		var out bytes.Buffer
		if err := write(&out); err != nil {
			if watch && ctx.Err() != nil {
				return nil
			}
			return err
		}
		if !bytes.Equal(out.Bytes(), shown) {
			if shown != nil && separate {
				fmt.Fprintln(a.stdout)
			}
			if _, err := a.stdout.Write(out.Bytes()); err != nil {
				return failed("write: %w", err)
			}
			shown = out.Bytes()
		}
		if !watch {
			return nil
		}
		if !clock.Sleep(ctx, a.refresh) {
			return nil
		}
	}
}

// filter returns the query that the flags stand for.
func (d *devicesListCmd) filter() apiclient.Query {
	filter := apiclient.Query{"select": d.Select, "state": d.State, "transport": d.Transport, "board": d.Board, "firmware": d.Firmware, "label": d.Label, "q": d.Search}
	if d.Sort != "id" { // the server's own order
		filter["sort"] = d.Sort
	}
	maps.DeleteFunc(filter, func(_, value string) bool { return value == "" })
	return filter
}

// write writes all devices.
func (d *devicesListCmd) write(ctx context.Context, a *app, c *apiclient.Client, out io.Writer) error {
	filter := d.filter()
	if d.CSV {
		return writeSheet(out, first(c.Devices(ctx, filter), d.Limit))
	}
	none := "no device matches"
	switch {
	case d.Select != "" && !isSelection(d.Select):
		none = fmt.Sprintf("no device has the label %s; `fleetd devices show %[1]s` shows one device", cleantext.Line(d.Select))
	case len(filter) == 0:
		none = "no devices yet; `fleetd doctor` shows the OTA URL to type into one"
	}
	head := []string{"ID", "NAME", "STATE", "TRANSPORT", "BOARD", "FIRMWARE", "TOOLS", "LAST SEEN"}
	return printList(ctx, a, out, c, listFlags{Limit: d.Limit, jsonFlags: jsonFlags{JSON: d.JSON}}, head, none, func(device api.Device) []string {
		row := []string{device.ID, device.Name, stateCell(device), device.Transport, device.Board, device.Firmware, toolsCell(device), seenCell(device)}
		for i, cell := range row {
			row[i] = cmp.Or(cell, "-")
		}
		return row
	}, filter, "devices")
}

// writeSheet writes devices as CSV. After an error, it has written the devices that came before.
func writeSheet(out io.Writer, devices iter.Seq2[api.Device, error]) error {
	sheet := csv.NewWriter(out)
	_ = sheet.Write(deviceColumns) // Flush reports it
	var failure error
	for device, err := range devices {
		if failure = err; failure != nil || sheet.Write(deviceCells(device)) != nil {
			break
		}
	}
	sheet.Flush()
	if err := sheet.Error(); failure == nil && err != nil {
		return failed("write: %w", err)
	}
	return failure
}

// deviceColumns are the columns of `devices --csv`; later versions only append to them.
var deviceColumns = []string{"id", "name", "state", "offline_reason", "offline_since", "transport", "node", "board", "firmware",
	"tools", "catalog_state", "first_seen", "last_seen", "labels"}

func deviceCells(d api.Device) []string {
	cells := []string{d.ID, d.Name, d.State, d.OfflineReason, utcText(d.OfflineSince), d.Transport, d.Node, d.Board, d.Firmware,
		strconv.Itoa(d.MCP.Tools), d.MCP.CatalogState, utcText(d.FirstSeen), utcText(d.LastSeen), labelsText(d.Labels)}
	for i, cell := range cells {
		cells[i] = csvCell(cell)
	}
	return cells
}

// csvCell prevents a spreadsheet from taking text of a device for a formula.
func csvCell(text string) string {
	text = cleantext.Line(text)
	if cleantext.IsFormula(text) {
		return "'" + text
	}
	return text
}

// labelsText returns labels in the notation of selections, in order of key.
func labelsText(labels map[string]string) string {
	var pairs []string
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		pairs = append(pairs, key+"="+labels[key])
	}
	return strings.Join(pairs, ",")
}

// stateCell is the state, and why the device is offline.
func stateCell(d api.Device) string {
	if d.State == "offline" && d.OfflineReason != "" {
		return "offline (" + d.OfflineReason + ")"
	}
	return d.State
}

// toolsCell is the number of tools, and why it may not be right.
func toolsCell(d api.Device) string {
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

// seenCell is when the device was last seen.
func seenCell(device api.Device) string {
	if device.State == "online" {
		return "now"
	}
	return timeCell(device.LastSeen)
}

type approveCmd struct {
	Device string `arg:"" help:"Device id, or the six-digit code that the device speaks."`
	Client string `arg:"" optional:"" help:"The client to admit, as devices show prints it; needed if another client is already admitted or several wait."`
	clientFlags
}

// Run approves.
func (cmd *approveCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return a.change(cmd.Device, "approved; this takes effect at the device's next OTA check", c.Approve(ctx, cmd.Device, cmd.Client))
}

type refuseCmd struct {
	Device string `arg:"" help:"Device id."`
	Client string `arg:"" help:"The client to refuse, as devices show prints it. It stays refused until an approval names it."`
	clientFlags
}

// Run refuses.
func (cmd *refuseCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return a.change(cmd.Device, "keeps its client; "+cleantext.Line(cmd.Client)+" is refused", c.Do(ctx, http.MethodDelete, nil, "devices", cmd.Device, "clients", cmd.Client))
}

type revokeCmd struct {
	Device string `arg:"" help:"Device id."`
	clientFlags
}

// Run revokes.
func (cmd *revokeCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	r, err := c.Revoke(ctx, cmd.Device)
	return a.change(cmd.Device, revokedText(r)+"; the device waits for approval from its next OTA check on", err)
}

type forgetCmd struct {
	Device string `arg:"" help:"Device id."`
	yesFlag
	clientFlags
}

// Run forgets.
func (cmd *forgetCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if err := cmd.ask(a, "Forget "+cmd.Device+"? Its name, labels and history go; it comes back as an unknown device."); err != nil {
		return err
	}
	return a.change(cmd.Device, "forgotten", c.Forget(ctx, cmd.Device))
}

// change prints what was done to the device or other thing with this name, unless it failed.
func (a *app) change(name, done string, err error) error {
	if err == nil {
		_, err = fmt.Fprintf(a.stdout, "%s %s\n", cleantext.Line(name), done)
	}
	return err
}

// revokedText says whether a revocation is in the database yet. It is in force in either case, so both are a success.
func revokedText(r api.Revocation) string {
	if r.Recorded {
		return "revoked"
	}
	return "revoked on " + count(len(r.Nodes), "node") + " (" + cleantext.Line(strings.Join(r.Nodes, ", ")) + "); the database is away, and the revocation is recorded there when it is back"
}
