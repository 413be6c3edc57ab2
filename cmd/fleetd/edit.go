package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

type editCmd struct {
	Target    string   `arg:"" name:"device|select" help:"Device id, or a selection such as room=lab. A single word is a device id; room=* selects all devices with the label room."`
	Labels    []string `arg:"" optional:"" name:"label" help:"KEY=VALUE sets a label, KEY- removes it; the others stay."`
	Name      *string  `help:"Name of the one device; empty removes it." placeholder:"NAME"`
	Transport *string  `help:"Transport to offer the device at its next boot: mqtt, websocket, or empty for the node's default." placeholder:"NAME" values:"mqtt,websocket"`
	IfMatch   int64    `help:"Change the device only if it is still at this revision, which devices show prints." placeholder:"REVISION"`
	Yes       bool     `short:"y" help:"Change the devices of a selection without asking."`
	jsonFlags
}

// Run changes one device or those of a selection.
func (cmd *editCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	labels, err := parseLabels(cmd.Labels)
	if err != nil {
		return err
	}
	if len(labels) == 0 && cmd.Name == nil && cmd.Transport == nil {
		return failed("nothing to change: give KEY=VALUE, KEY-, --name or --transport")
	}
	selects := isSelection(cmd.Target)
	switch {
	case selects && cmd.Name != nil:
		return failed("--name is for one device, and %q is a selection", cmd.Target)
	case selects && cmd.IfMatch != 0:
		return failed("--if-match is for one device, and %q is a selection", cmd.Target)
	}
	if selects {
		return cmd.editSelection(ctx, a, c, labels)
	}
	return cmd.editDevice(ctx, a, c, labels)
}

// isSelection reports whether a target is a selection and not a device id, which has none of its characters.
func isSelection(target string) bool { return strings.ContainsAny(target, "=!<>(),* ") }

// parseLabels reads KEY=VALUE and KEY-; nil removes a label.
func parseLabels(texts []string) (map[string]*string, error) {
	labels := make(map[string]*string)
	for _, text := range texts {
		key, value, sets := strings.Cut(text, "=")
		if !sets {
			var removes bool
			if key, removes = strings.CutSuffix(text, "-"); !removes {
				return nil, failed("%q is not KEY=VALUE or KEY-", text)
			}
		}
		if _, twice := labels[key]; key == "" || twice {
			return nil, failed("%q: each label needs a key, and each key occurs once", text)
		}
		labels[key] = nil
		if sets {
			labels[key] = &value
		}
	}
	return labels, nil
}

// editDevice changes one device.
func (cmd *editCmd) editDevice(ctx context.Context, a *app, c *apiclient.Client, labels map[string]*string) error {
	patched, err := c.Patch(ctx, cmd.Target, api.DeviceEdit{Name: cmd.Name, Labels: labels, TransportWanted: cmd.Transport}, cmd.IfMatch)
	if isStale(err) {
		return exitError{fmt.Errorf("%s is no longer at revision %d; nothing was changed: %w", cmd.Target, cmd.IfMatch, err), exitRefused}
	}
	if err != nil {
		return err
	}
	if cmd.JSON {
		return printValue(a.stdout, patched)
	}
	text := cleantext.Line(cmd.Target) + " changed"
	if patched.Applies != "" {
		text += "; the transport applies at its " + cleantext.Line(patched.Applies)
	}
	_, err = fmt.Fprintln(a.stdout, text)
	return err
}

// isStale reports whether the device had changed since it was read.
func isStale(err error) bool {
	var problem *apiclient.Problem
	return errors.As(err, &problem) && problem.Status == http.StatusPreconditionFailed
}

// editSelection changes all devices of a selection, with a question before it changes more than one.
func (cmd *editCmd) editSelection(ctx context.Context, a *app, c *apiclient.Client, labels map[string]*string) error {
	if !cmd.Yes {
		counts, err := apiclient.Get[api.FleetCounts](ctx, c, apiclient.Query{"select": cmd.Target}, "fleet")
		if err != nil {
			return err
		}
		if counts.Total == 0 && !cmd.JSON {
			_, err := fmt.Fprintln(a.stdout, "no device matches; nothing was changed")
			return err
		}
		if counts.Total > 1 && !a.confirmed(fmt.Sprintf("%d devices match %s; change them?", counts.Total, cleantext.Line(cmd.Target))) {
			return exitError{fmt.Errorf("%d devices match; nothing was changed: add --yes to change them", counts.Total), exitRefused}
		}
	}
	patched, err := c.PatchSelected(ctx, cmd.Target, api.SelectionEdit{Labels: labels, TransportWanted: cmd.Transport})
	if err != nil {
		return err
	}
	if cmd.JSON {
		return printValue(a.stdout, patched)
	}
	text := fmt.Sprintf("%d of %s changed", int64(patched.Changed), devicesText(int64(patched.Matched)))
	if cmd.Transport != nil {
		text += "; the transport applies at the next boot"
	}
	_, err = fmt.Fprintln(a.stdout, text)
	return err
}

// devicesText writes a number of devices.
func devicesText(n int64) string { return count(int(n), "device") }
