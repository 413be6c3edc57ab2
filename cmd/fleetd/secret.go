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

type secretCmd struct {
	Rotate secretRotateCmd `cmd:"" help:"Replace the secret from which all credentials derive, or the admin token alone."`
}

type secretRotateCmd struct {
	AdminOnly bool          `help:"Replace only the admin token; the old one ends at once on all nodes."`
	Grace     time.Duration `help:"How long the old credentials stay valid for devices that have not restarted since the rotation, 1m to 365d." default:"30d"`
	Yes       bool          `short:"y" help:"Rotate without asking, for scripts."`
	jsonFlags `set:"json=the server's answer, with the new admin token, as JSON"`
}

// Run rotates, after a question.
func (cmd *secretRotateCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	question := "Replace the fleet's secret? Every device needs an OTA check, which it makes when it boots, before " +
		a.now().Add(cmd.Grace).UTC().Format(time.RFC3339) + ". The admin token ends at once."
	if cmd.AdminOnly {
		question = "End the admin token on all nodes? Whatever uses it needs the new one."
	}
	if !cmd.Yes && !a.confirmed(question) {
		return exitError{fmt.Errorf("nothing was done: add --yes to confirm it"), exitRefused}
	}
	body := api.SecretRotation{AdminOnly: cmd.AdminOnly}
	if !cmd.AdminOnly {
		body.Grace = cmd.Grace.String()
	}
	r, err := apiclient.Send[api.RotatedSecret](ctx, c, apiclient.Request{Method: http.MethodPost, Path: []string{"secret", "rotate"}, Body: body})
	if err != nil {
		return err
	}
	if cmd.JSON {
		return printValue(a.stdout, r)
	}
	if !cmd.AdminOnly {
		fmt.Fprintf(a.stdout, "secret %d is in force; new credentials, of generation %d, come with the next OTA check: restart what does not restart by itself before %s\n",
			r.Secret, r.Generation, r.PreviousUntil.UTC().Format(time.RFC3339))
	}
	return cmd.tell(ctx, a, c, r)
}

// tokenTime is how long a node may take to write its admin token; it does so right after it has answered.
const tokenTime = 5 * time.Second

// tell prints where the new admin token is, once the file has it: scripts go on with it.
func (cmd *secretRotateCmd) tell(ctx context.Context, a *app, c *apiclient.Client, r api.RotatedSecret) error {
	var err error
	if dir, ok := c.Local(); ok {
		for until := time.Now().Add(tokenTime); ; {
			next, err := apiclient.Discover(dir, "", "")
			if err == nil && next.HasToken(r.AdminToken) {
				break
			}
			if time.Now().After(until) || ctx.Err() != nil {
				return failed("the admin token was rotated, but %s/admin-token does not have the new one yet; look at the node's log", dir)
			}
			time.Sleep(20 * time.Millisecond)
		}
		_, err = fmt.Fprintf(a.stdout, "the new admin token is in %s/admin-token, and in the data directory of every other node\n", dir)
	} else {
		_, err = fmt.Fprintf(a.stdout, "the new admin token: %s\n", cleantext.Line(r.AdminToken))
	}
	return err
}
