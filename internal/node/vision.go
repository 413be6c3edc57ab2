package node

import (
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/events"
	"fleetd/internal/store/photos"
	"fleetd/internal/vision"
)

// openVision creates the photo receiver. The name of its object store begins with the prefix,
// as that of the event stream does.
func (n *node) openVision() error {
	js, err := jetstream.New(n.bus.conn)
	if err != nil {
		return fmt.Errorf("photos: %w", err)
	}
	n.vision = vision.New(vision.Options{Mint: n.mint, JetStream: js,
		Index:     photos.New(n.store),
		Bucket:    events.StreamName(n.cfg.NATSPrefix, "PHOTOS"),
		Retention: n.cfg.PhotoRetention, Limit: n.cfg.PhotoLimit, Replicas: n.cfg.NATSReplicas, PublicURL: n.publicURL,
		MinRate: n.cfg.UploadMinRate, TrustedProxies: n.cfg.TrustedProxies, Failures: n.failures["device-listen"], Log: n.log,
		Chat:    vision.ChatOptions{URL: n.cfg.VisionURL, Model: n.cfg.VisionModel, Key: n.cfg.VisionKey},
		Subject: n.cfg.NATSPrefix + ".vision.explain"})
	n.onStop(n.vision.Close)
	n.whileRunning(n.vision.Keep)
	return nil
}
