package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

type webhooksCmd struct {
	List   webhooksListCmd   `cmd:"" default:"withargs" help:"List the webhooks (the default)."`
	Create webhooksCreateCmd `cmd:"" help:"Create a webhook and print its secret, which is shown this once."`
	Edit   webhooksEditCmd   `cmd:"" help:"Change a webhook."`
	Delete webhooksDeleteCmd `cmd:"" help:"Delete a webhook."`
	Test   webhooksTestCmd   `cmd:"" help:"Deliver a test message."`
}

type webhooksListCmd struct {
	JSON bool `name:"json" help:"Print the server's JSON, one webhook per line."`
	clientFlags
}

// Run prints the webhooks.
func (cmd *webhooksListCmd) Run(ctx context.Context, a *app) error {
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	rows := [][]string{{"ID", "STATE", "TYPES", "SELECT", "CREATED BY", "DELIVERED", "LAST", "URL", "PROBLEM"}}
	for h, err := range c.Webhooks(ctx) {
		if err != nil {
			return err
		}
		if cmd.JSON {
			if err := printJSONLine(a.stdout, h.Raw); err != nil {
				return err
			}
			continue
		}
		types, problem := strings.Join(h.Types, ","), h.Reason
		if h.OfflineFor != "" {
			types += " (offline for " + h.OfflineFor + ")"
		}
		if h.State == "failing" {
			problem = h.LastError + ", since " + ago(h.FailingSince.Time, a.now())
		}
		rows = append(rows, []string{h.ID, h.State, types, cmp.Or(h.Select, "all"), h.CreatedBy, fmt.Sprint(h.Delivered), ago(h.DeliveredAt.Time, a.now()), h.URL, problem})
	}
	switch {
	case cmd.JSON:
		return nil
	case len(rows) == 1:
		fmt.Fprintln(a.stdout, "no webhooks yet; `fleetd webhooks create` makes one")
		return nil
	}
	return a.table(a.stdout, "", rows)
}

type webhooksCreateCmd struct {
	URL        string   `arg:"" help:"Where events are delivered to." placeholder:"URL"`
	Types      []string `required:"" help:"Types of events, such as offline,online,photo,job.halted." placeholder:"TYPE[,TYPE]"`
	Select     string   `help:"Only events of devices that this selects by device and labels, such as room=lab." placeholder:"SELECT"`
	OfflineFor string   `help:"Deliver offline only when a device has been offline for this long." placeholder:"10m"`
	Secret     string   `help:"whsec_ and base64; without it a new one is made and printed." placeholder:"SECRET"`
	clientFlags
}

// Run creates the webhook. A secret goes to standard output alone, so that a script can take it.
func (cmd *webhooksCreateCmd) Run(ctx context.Context, a *app) error {
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	h, err := c.CreateWebhook(ctx, api.NewWebhook{URL: cmd.URL, Types: cmd.Types, Select: cmd.Select, OfflineFor: cmd.OfflineFor, Secret: cmd.Secret})
	if err != nil {
		return err
	}
	return printWebhook(a, h)
}

func printWebhook(a *app, h apiclient.Webhook) error {
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
	clientFlags
}

// Run changes the webhook.
func (cmd *webhooksEditCmd) Run(ctx context.Context, a *app) error {
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
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	h, err := c.EditWebhook(ctx, cmd.ID, edit)
	if err != nil {
		return err
	}
	return printWebhook(a, h)
}

type webhooksDeleteCmd struct {
	ID string `arg:"" help:"Id of the webhook."`
	clientFlags
}

// Run deletes the webhook.
func (cmd *webhooksDeleteCmd) Run(ctx context.Context, a *app) error {
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	if err := c.DeleteWebhook(ctx, cmd.ID); err != nil {
		return err
	}
	fmt.Fprintf(a.stdout, "%s deleted\n", cleantext.Line(cmd.ID))
	return nil
}

type webhooksTestCmd struct {
	ID string `arg:"" help:"Id of the webhook."`
	clientFlags
}

// Run delivers the message; a receiver that does not accept it is status 2.
func (cmd *webhooksTestCmd) Run(ctx context.Context, a *app) error {
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	t, err := c.TestWebhook(ctx, cmd.ID)
	if err != nil {
		return err
	}
	if !t.Delivered {
		return fmt.Errorf("not delivered: %s", t.Error)
	}
	fmt.Fprintf(a.stdout, "delivered in %d ms, answered %d\n", t.DurationMS, t.Status)
	return nil
}
