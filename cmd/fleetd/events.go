package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
	"fleetd/internal/jsonspan"
)

type eventsCmd struct {
	Device    string `device:"former" arg:"" optional:"" help:"Only events of this device."`
	Type      string `help:"Only events of this type, such as online or notifications." placeholder:"TYPE"`
	Since     string `help:"Begin with the events since then: a duration before now such as 1h, a date or a time. Without it, only new events are printed." placeholder:"1h|TIME"`
	jsonFlags `set:"json=one JSON object per line: id, type, and the server's data"`
}

// Run prints events until interrupted.
func (e *eventsCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	var since time.Time
	if e.Since != "" {
		var err error
		if since, err = moment(e.Since, a.now(), -1); err != nil {
			return failed("--since %w", err)
		}
	}
	options := apiclient.EventOptions{Device: e.Device, Type: e.Type, Since: since, OnRetry: func(cause error, wait time.Duration) {
		fmt.Fprintf(a.stderr, "fleetd: %s; trying again in %s\n", cleantext.Line(cause.Error()), wait)
	}}
	if a.interactive { // until the first event a person sees nothing else
		options.OnOpen = func() { fmt.Fprintf(a.stderr, "fleetd: connected to %s; Ctrl-C ends\n", cleantext.Line(c.Base())) }
	}
	show := printEvent
	if e.JSON {
		show = printEventJSON
	}
	for event, err := range c.Events(ctx, options) {
		if err != nil {
			return err
		}
		if err := show(a, event); err != nil {
			return failed("write: %w", err)
		}
	}
	return nil
}

// printEventJSON prints an event as JSON, with what its data lacks: the id after which to resume, and the type.
func printEventJSON(a *app, event apiclient.Event) error {
	data := json.RawMessage(event.Data)
	if !json.Valid(data) {
		data = jsonspan.AppendString(nil, string(event.Data))
	}
	line, err := json.Marshal(struct {
		ID   string          `json:"id,omitempty"`
		Type string          `json:"type"`
		Data json.RawMessage `json:"data"`
	}{event.ID, event.Type, data})
	if err != nil {
		return err
	}
	return printJSONLine(a.stdout, line)
}

// printEvent prints the time, device and type of an event and its other members, without those by which programs order
// events.
func printEvent(a *app, event apiclient.Event) error {
	var at, device string
	var rest []string
	walk := jsonspan.Object(event.Data)
	for walk.Next() {
		name, value := string(walk.Key()), string(walk.Value())
		switch text := strings.Trim(value, `"`); name {
		case "time":
			at = text
		case "device":
			device = text
		case "node", "session", "epoch", "seq", "type":
		default:
			rest = append(rest, name+"="+value)
		}
	}
	if walk.Err() != nil {
		at, device, rest = "", "", []string{string(event.Data)}
	}
	_, err := fmt.Fprintf(a.stdout, "%-24s  %-17s  %-10s  %s\n", cmp.Or(cleantext.Line(at), a.now().UTC().Format("2006-01-02T15:04:05.000Z")),
		cmp.Or(cleantext.Line(device), "-"), cleantext.Line(event.Type), cleantext.Line(string(safeJSON([]byte(strings.Join(rest, " "))))))
	return err
}
