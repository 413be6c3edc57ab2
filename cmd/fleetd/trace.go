package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

// traceEndTime is how long the end of a trace may take after an interruption.
const traceEndTime = 3 * time.Second

type traceCmd struct {
	Device    string `device:"name" arg:"" help:"Id or name of the device."`
	Payload   bool   `help:"Print the messages themselves, 1 KiB of each, without secrets; needs the scope admin."`
	For       string `default:"10m" help:"End after this time, at most 24h." placeholder:"10m"`
	jsonFlags `set:"json=one JSON object per line, as the server sent it"`
}

// Run prints the messages of a device until the time is over or it is interrupted, which ends the trace.
func (cmd *traceCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	started, err := c.StartTrace(ctx, cmd.Device, api.NewTrace{For: cmd.For, Payload: cmd.Payload})
	if err != nil {
		return err
	}
	for _, node := range started.Missing {
		fmt.Fprintf(a.stderr, "fleetd: node %s did not answer; nothing is shown while the device is connected to it\n", cleantext.Line(node))
	}
	if a.interactive {
		fmt.Fprintf(a.stderr, "fleetd: tracing %s until %s; Ctrl-C ends\n", cleantext.Line(started.Device), started.ExpiresAt.UTC().Format(time.RFC3339))
	}
	ended := false
	defer func() {
		if ended {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), traceEndTime)
		defer cancel()
		if err := c.EndTrace(ctx, cmd.Device); err != nil {
			fmt.Fprintf(a.stderr, "fleetd: the trace ends within 30 s: %s\n", cleantext.Line(err.Error()))
		}
	}()
	retry := func(cause error, wait time.Duration) {
		fmt.Fprintf(a.stderr, "fleetd: %s; trying again in %s\n", cleantext.Line(cause.Error()), wait)
	}
	for event, err := range c.TraceEvents(ctx, cmd.Device, retry) {
		switch {
		case err != nil:
			return err
		case event.Type == "end":
			ended = true
		case cmd.JSON:
			err = printJSONLine(a.stdout, event.Data)
		default:
			err = printTraceEntry(a, event)
		}
		if err != nil {
			return failed("write: %w", err)
		}
	}
	return nil
}

// traceArrows are the directions of messages.
var traceArrows = map[string]string{"received": "device ->", "sent": "device <-"}

func printTraceEntry(a *app, event apiclient.Event) error {
	var e api.TraceEntry
	if err := json.Unmarshal(event.Data, &e); err != nil {
		return fmt.Errorf("the server sent an entry that is not valid: %w", err)
	}
	parts := []string{cmp.Or(e.Type, "-")}
	for _, text := range []string{e.Method, e.Cause, e.Text, e.Call} {
		if text != "" {
			parts = append(parts, text)
		}
	}
	if e.RPC != "" {
		parts = append(parts, "id="+e.RPC)
	}
	if e.Bytes > 0 {
		parts = append(parts, strconv.Itoa(e.Bytes)+" bytes")
	}
	if e.Dropped > 0 {
		parts = append(parts, fmt.Sprintf("(%d before it left out)", e.Dropped))
	}
	_, err := fmt.Fprintf(a.stdout, "%s  %-9s  %s\n", e.At.UTC().Format("15:04:05.000"), cmp.Or(traceArrows[e.Kind], cleantext.Line(e.Kind)), cleantext.Line(strings.Join(parts, " ")))
	if err == nil && e.Payload != "" {
		_, err = fmt.Fprintf(a.stdout, "    %s\n", cleantext.Line(e.Payload))
	}
	return err
}
