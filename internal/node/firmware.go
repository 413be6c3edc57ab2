package node

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/access"
	"fleetd/internal/datadir"
	"fleetd/internal/devices"
	"fleetd/internal/events"
	"fleetd/internal/firmware"
	"fleetd/internal/rollout"
	"fleetd/internal/store/firmwarestore"
)

// bars returns why devices get no firmware for now.
func (n *node) bars(ctx context.Context, ids []devices.ID) (map[devices.ID]string, error) {
	marks, err := n.jobs.store.Marks(ctx, ids)
	if err != nil {
		return nil, err
	}
	out, now := map[devices.ID]string{}, n.jobs.store.Now()
	for id, m := range marks {
		if m.BarredUntil.After(now) {
			out[id] = m.Reason + " (until " + m.BarredUntil.UTC().Format(time.RFC3339) + "; `fleetd firmware unbar` lifts it)"
		}
	}
	return out, nil
}

// imageInUse returns an open job that gives devices an image, or an empty text.
func (n *node) imageInUse(ctx context.Context, image string) (string, error) {
	open, err := n.jobs.store.Open(ctx)
	for i := range open {
		if f := open[i].Spec.Action.Firmware; f != nil && f.Image == image {
			return open[i].ID, nil
		}
	}
	return "", err
}

// startRollout makes what moves firmware tasks on, before their first commits.
func (s *jobsSide) startRollout(mayBegin func() bool) {
	n := s.node
	s.rollout = rollout.New(rollout.Options{Store: s.store, Fleet: n.service, Images: n.firmware, MayBegin: mayBegin, MayAct: s.mayAct, Nodes: n.nodes, Newest: n.firmware.Store.Newest, Publish: n.service.Publish, Downloads: n.cfg.FirmwareDownloads, Log: n.log,
		Active: func() bool {
			run := s.runner.Load()
			return run != nil && run.Rolling()
		}})
	n.onStop(s.rollout.Close)
}

// mayAct returns why the owner of a firmware job may not have it done on a device any more.
func (s *jobsSide) mayAct(ctx context.Context, owner string, id devices.ID) *devices.Error {
	p, ok, err := s.runner.Load().Owner(owner)
	switch {
	case err != nil:
		return devices.Errorf(devices.CodeUnauthorized, "%v", err)
	case !ok:
		return devices.Errorf(devices.CodeUnavailable, "this node does not have the key of the job yet")
	}
	if err := s.node.service.Permit(ctx, p, access.ScopeFirmware, id); err != nil {
		return devices.AsError(err)
	}
	return nil
}

// owner returns the caller as whom the jobs of an owner act.
func (s *jobsSide) owner(owner string) (access.Principal, bool) {
	p, ok, err := s.runner.Load().Owner(owner)
	return p, ok && err == nil
}

// startFirmware makes the store of firmware images.
func (n *node) startFirmware() error {
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
		Dir: n.dir.File(datadir.DirFirmware), MaxFile: n.cfg.FirmwareLimit, Storage: n.cfg.FirmwareStorage, Keys: keys, Server: n.publicURL, Bars: n.bars, InUse: n.imageInUse, Log: n.log})
	n.whileRunning(n.firmware.Tidy)
	return nil
}
