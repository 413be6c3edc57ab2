package main

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

type webhooksCmd struct {
	List   webhooksListCmd   `cmd:"" default:"withargs" help:"List the webhooks (the default)."`
	Create webhooksCreateCmd `cmd:"" help:"Create a webhook and print its secret, which is shown only once."`
	Edit   webhooksEditCmd   `cmd:"" help:"Change a webhook."`
	Delete webhooksDeleteCmd `cmd:"" help:"Delete a webhook."`
	Test   webhooksTestCmd   `cmd:"" help:"Deliver a test message to the receiver of a webhook."`
}

type webhooksListCmd struct {
	listFlags `set:"per=, one webhook per line"`
}

// Run prints the webhooks.
func (cmd *webhooksListCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	head := []string{"ID", "STATE", "TYPES", "SELECT", "CREATED BY", "DELIVERED", "LAST", "URL", "PROBLEM"}
	return printList(ctx, a, a.stdout, c, cmd.listFlags, head, "no webhooks yet; `fleetd webhooks create` makes one", func(h api.Webhook) []string {
		types, problem := strings.Join(h.Types, ","), h.Reason
		if h.OfflineFor != "" {
			types += " (offline for " + h.OfflineFor + ")"
		}
		if h.State == "failing" {
			problem = h.LastError + ", since " + timeCell(h.FailingSince)
		}
		return []string{h.ID, h.State, types, cmp.Or(h.Select, "all"), h.CreatedBy, fmt.Sprint(h.Delivered), timeCell(h.DeliveredAt), h.URL, problem}
	}, nil, "webhooks")
}

type webhooksCreateCmd struct {
	URL        string   `arg:"" help:"Where events are delivered to." placeholder:"URL"`
	Types      []string `required:"" help:"Types of events, such as offline,online,photo,job.halted." placeholder:"TYPE[,TYPE]"`
	Select     string   `help:"Only events of devices that this selects by device and labels, such as room=lab." placeholder:"SELECT"`
	OfflineFor string   `help:"Deliver offline only when a device has been offline for this long." placeholder:"10m"`
	Secret     string   `help:"Secret of the webhook: whsec_ and base64; without it, a new one is made and printed." placeholder:"SECRET"`
	jsonFlags
}

// Run creates the webhook. A secret goes to standard output alone, so that a script can take it.
func (cmd *webhooksCreateCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	h, err := c.CreateWebhook(ctx, api.NewWebhook{URL: cmd.URL, Types: cmd.Types, Select: cmd.Select, OfflineFor: cmd.OfflineFor, Secret: cmd.Secret})
	if err != nil {
		return err
	}
	return printWebhook(a, cmd.JSON, h)
}

func printWebhook(a *app, asJSON bool, h api.CreatedWebhook) error {
	if asJSON {
		return printValue(a.stdout, h)
	}
	text := "webhook " + cleantext.Line(h.ID)
	if h.Secret == "" {
		fmt.Fprintln(a.stderr, "fleetd: "+text)
		return nil
	}
	fmt.Fprintln(a.stderr, "fleetd: "+text+"; its secret is not shown again")
	_, err := fmt.Fprintln(a.stdout, cleantext.Line(h.Secret))
	return err
}

type webhooksEditCmd struct {
	ID         string   `arg:"" help:"Id of the webhook."`
	URL        *string  `name:"url" help:"Where events are delivered to." placeholder:"URL"`
	Types      []string `help:"Types of events, in place of those before." placeholder:"TYPE[,TYPE]"`
	Select     *string  `help:"Only events of devices that this selects; empty: all." placeholder:"SELECT"`
	OfflineFor *string  `help:"Deliver offline only when a device has been offline for this long; empty: at once." placeholder:"10m"`
	NewSecret  bool     `help:"Make a new secret and print it. Deliveries from now on are signed with it."`
	Enable     bool     `help:"Deliver again, after the webhook was disabled because its receiver had failed for days."`
	jsonFlags
}

// Run changes the webhook.
func (cmd *webhooksEditCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	edit := api.WebhookEdit{URL: cmd.URL, Select: cmd.Select, OfflineFor: cmd.OfflineFor}
	if len(cmd.Types) > 0 {
		edit.Types = &cmd.Types
	}
	if cmd.NewSecret {
		edit.Secret = new(string)
	}
	if cmd.Enable {
		state := "active"
		edit.State = &state
	}
	if edit.State == nil && edit.URL == nil && edit.Types == nil && edit.Select == nil && edit.OfflineFor == nil && edit.Secret == nil {
		return failed("nothing to change; give --url, --types, --select, --offline-for, --new-secret or --enable")
	}
	h, err := apiclient.Send[api.CreatedWebhook](ctx, c, apiclient.Request{Method: http.MethodPatch, Path: []string{"webhooks", cmd.ID}, Body: edit})
	if err != nil {
		return err
	}
	return printWebhook(a, cmd.JSON, h)
}

type webhooksDeleteCmd struct {
	ID string `arg:"" help:"Id of the webhook."`
	yesFlag
	clientFlags
}

// Run deletes the webhook.
func (cmd *webhooksDeleteCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if err := cmd.ask(a, "Delete the webhook "+cmd.ID+"? What waits for its receiver is lost."); err != nil {
		return err
	}
	return a.change(cmd.ID, "deleted", c.Do(ctx, http.MethodDelete, nil, "webhooks", cmd.ID))
}

type webhooksTestCmd struct {
	ID string `arg:"" help:"Id of the webhook."`
	jsonFlags
}

// Run delivers the message; a receiver that does not accept it is status 2.
func (cmd *webhooksTestCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	t, err := apiclient.Send[api.WebhookTest](ctx, c, apiclient.Request{Method: http.MethodPost, Path: []string{"webhooks", cmd.ID, "test"}})
	if err != nil {
		return err
	}
	if cmd.JSON {
		if err := printValue(a.stdout, t); err != nil {
			return err
		}
	}
	if !t.Delivered {
		return fmt.Errorf("not delivered: %s", t.Error)
	}
	if !cmd.JSON {
		fmt.Fprintf(a.stdout, "delivered in %d ms, answered %d\n", t.DurationMS, t.Status)
	}
	return nil
}
