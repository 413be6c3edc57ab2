package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

type rotateCmd struct {
	Device string        `device:"name" arg:"" optional:"" help:"Id or name of the device; none with --all."`
	All    bool          `help:"Rotate the credentials of all devices."`
	Grace  time.Duration `help:"How long the old credentials stay valid for devices that have not restarted since the rotation, 1m to 365d." default:"30d"`
	jsonFlags
}

// Run rotates the credentials of one device or of all.
func (cmd *rotateCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if (cmd.Device == "") != cmd.All {
		return failed("give a device, or --all (see fleetd devices rotate --help)")
	}
	who, rotate := "all devices", apiclient.Request{Method: http.MethodPost, Path: []string{"devices", "rotate"}, Body: api.Grace{Grace: cmd.Grace.String()}}
	var after api.Credentials
	var err error
	if cmd.All {
		after, err = apiclient.Send[api.Credentials](ctx, c, rotate)
	} else {
		who, rotate.Path = cleantext.Line(cmd.Device), []string{"devices", cmd.Device, "rotate"}
		var d api.Device
		d, err = apiclient.Send[api.Device](ctx, c, rotate)
		after = d.Credentials
	}
	if err != nil {
		return err
	}
	if cmd.JSON {
		return printValue(a.stdout, after)
	}
	fmt.Fprintf(a.stdout, "%s rotated to generation %d; new credentials come with the next OTA check: restart each device that does not restart by itself before %s\n",
		who, after.Generation, after.PreviousUntil.UTC().Format(time.RFC3339))
	return nil
}
