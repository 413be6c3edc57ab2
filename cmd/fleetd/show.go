package main

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

type showCmd struct {
	Device string `device:"name" arg:"" help:"Id or name of the device."`
	jsonFlags
}

// Run prints one device.
func (cmd *showCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	show := func(d api.Device) error { return aligned(a.stdout, "", deviceRows(d, a.now()), 0) }
	return printAnswer(ctx, a, c, cmd.JSON, show, nil, "devices", cmd.Device)
}

// deviceRows are the lines of one device. Lines that would say nothing are left out.
func deviceRows(d api.Device, now time.Time) [][]string {
	rows := [][]string{{"Device", d.ID}, {"Name", cmp.Or(d.Name, "-")}, {"State", fullState(d, now)}}
	add := func(name, value string) {
		if value != "" {
			rows = append(rows, []string{name, value})
		}
	}
	add("Transport", d.Transport)
	add("Wanted", d.TransportWanted)
	add("Node", d.Node)
	add("Board", cmp.Or(d.Board, "-"))
	add("Firmware", cmp.Or(d.Firmware, "-"))
	add("Client", cmp.Or(d.Client, "-"))
	add("Client-Id", d.ClientID)
	for _, p := range d.Pending {
		waits := cmp.Or(p.Client, "a client without Client-Id") + " waits for approval since " + timeText(p.Since.Time, now)
		if p.Address != "" {
			waits += ", from " + p.Address
		}
		rows = append(rows, []string{"", waits})
	}
	credentials := "generation " + strconv.FormatInt(d.Credentials.Generation, 10)
	if !d.Credentials.PreviousUntil.IsZero() {
		credentials += "; older ones are valid until " + d.Credentials.PreviousUntil.UTC().Format(time.RFC3339)
	}
	add("Credentials", credentials)
	add("Labels", cmp.Or(labelsText(d.Labels), "-"))
	add("Tools", toolsText(d.MCP))
	add("Catalog", d.MCP.Catalog)
	if d.State == "online" {
		add("Session", d.SessionID)
		audio := "closed"
		if d.Audio.Open {
			audio = fmt.Sprintf("open, %d packets, %d dropped", d.Audio.Packets, d.Audio.Dropped)
		}
		add("Audio", audio)
	}
	add("First seen", timeText(d.FirstSeen.Time, now))
	if d.State == "online" {
		add("Last seen", "now")
	} else {
		add("Last seen", timeText(d.LastSeen.Time, now))
	}
	if d.Revision > 0 {
		add("Revision", strconv.FormatInt(d.Revision, 10))
	}
	return rows
}

// fullState is the state with its reason and its beginning.
func fullState(d api.Device, now time.Time) string {
	text, since := stateCell(d), d.OfflineSince
	if d.State == "online" {
		since = d.ConnectedAt
	}
	if since.IsZero() {
		return text
	}
	return text + " since " + timeText(since.Time, now)
}

// toolsText is how many tools the device has, and how far they are known.
func toolsText(m api.DeviceMCP) string {
	var text string
	switch m.CatalogState {
	case "ready", "stale":
		text = strconv.Itoa(m.Tools) + ", " + m.CatalogState
	default:
		text = cmp.Or(m.State, m.CatalogState)
	}
	if m.CatalogState == "stale" {
		text += ": known from before, not confirmed on this connection"
	}
	if m.Partial {
		text += "; the device's list could not be read to its end"
	}
	if m.Error != "" {
		text += "; " + m.Error
	}
	return text
}
