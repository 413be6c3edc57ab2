package node

import (
	"context"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/datadir"
	"fleetd/internal/events"
	"fleetd/internal/firmware"
	"fleetd/internal/store/firmwarestore"
)

// startFirmware makes the store of firmware images.
func (n *node) startFirmware(ctx context.Context) error {
	js, err := jetstream.New(n.bus.conn)
	if err != nil {
		return fmt.Errorf("firmware: %w", err)
	}
	var keys firmware.Keys
	if n.cfg.FirmwareKeys != "" {
		if keys, err = firmware.ReadKeys(n.cfg.FirmwareKeys); err != nil {
			return fmt.Errorf("--firmware-keys: %w", err)
		}
	}
	n.firmware = firmware.New(firmware.Options{Store: firmwarestore.New(n.store), Fleet: n.service, JetStream: js, Bucket: events.StreamName(n.cfg.NATSPrefix, "FIRMWARE"), Replicas: n.cfg.NATSReplicas,
		Dir: n.dir.File(datadir.DirFirmware), MaxFile: n.cfg.FirmwareLimit, Storage: n.cfg.FirmwareStorage, Keys: keys, Server: n.publicURL, Log: n.log})
	defer n.whileRunning(n.firmware.Repair)
	if n.store.Ready() != nil {
		return nil // the next start cleans
	}
	if err := n.firmware.Clean(ctx); err != nil {
		n.log.Warn("firmware files that belong to no image could not be removed; the next start tries again", "error", err)
	}
	return nil
}
