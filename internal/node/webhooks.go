package node

import (
	"crypto/rand"

	"fleetd/internal/egress"
	"fleetd/internal/store/webhookstore"
	"fleetd/internal/webhooks"
)

// startWebhooks starts to deliver webhooks. They end before the parts from which they read.
func (n *node) startWebhooks() error {
	allow, err := egress.Parse("--webhook-allow", n.cfg.WebhookAllow)
	if err != nil {
		return err
	}
	n.webhooks = webhooks.New(webhooks.Options{Store: webhookstore.New(n.store), Fleet: n.service, Events: n.events, Mint: n.mint, Allow: allow,
		Instance: n.cfg.Node + " " + rand.Text(), Open: n.cfg.APIAuth == "none", Version: n.cfg.Version, Log: n.log})
	n.onStop(n.webhooks.Close)
	return nil
}
