package devicetest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"fleetd/internal/devices"
)

// AttestationKey is a keeper of attestation keys, like the four below.
func (p *Ports) AttestationKey(_ context.Context, serial string) (devices.AttestationKey, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, ok := p.Chips[serial]
	if err := p.failure(); err != nil || !ok {
		return k, fmt.Errorf("%s: %w", serial, orNotFound(err))
	}
	return k, nil
}

func orNotFound(err error) error {
	if err != nil {
		return err
	}
	return devices.ErrNotFound
}

// boundLocked is the serial number that proves the device, if it is another.
func (p *Ports) boundLocked(serial string, id devices.ID) error {
	for other, k := range p.Chips {
		if id != "" && other != serial && k.Device == id {
			return fmt.Errorf("serial number %s is bound to %s: %w", other, id, devices.ErrBound)
		}
	}
	return nil
}

// ProvenBy finds the serial number of a device.
func (p *Ports) ProvenBy(_ context.Context, id devices.ID) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for serial, k := range p.Chips {
		if k.Device == id {
			return serial, p.failure()
		}
	}
	return "", orNotFound(p.failure())
}

// BindAttestationKey binds a key once.
func (p *Ports) BindAttestationKey(_ context.Context, serial string, id devices.ID, now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, ok := p.Chips[serial]
	if err := p.failure(); err != nil || !ok {
		return orNotFound(err)
	}
	if k.Device != "" && k.Device != id {
		return fmt.Errorf("serial number %s is bound to %s: %w", serial, k.Device, devices.ErrBound)
	}
	if err := p.boundLocked(serial, id); err != nil {
		return err
	}
	k.Device, k.BoundAt = id, now
	p.Chips[serial] = k
	return nil
}

// SaveAttestationKeys adds all keys or none.
func (p *Ports) SaveAttestationKeys(_ context.Context, keys []devices.AttestationKey) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.failure(); err != nil {
		return err
	}
	for _, k := range keys {
		if err := p.boundLocked(k.Serial, k.Device); err != nil {
			return err
		}
	}
	for _, k := range keys {
		if old, ok := p.Chips[k.Serial]; ok && k.Device == "" {
			k.Device, k.BoundAt = old.Device, old.BoundAt
		}
		p.Chips[k.Serial] = k
	}
	return nil
}

// ResealAttestationKey replaces how a key is sealed.
func (p *Ports) ResealAttestationKey(_ context.Context, serial, old, sealed string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if k, ok := p.Chips[serial]; ok && k.Sealed == old {
		k.Sealed = sealed
		p.Chips[serial] = k
	}
	return p.failure()
}

// AttestationKeys lists keys by serial number.
func (p *Ports) AttestationKeys(_ context.Context, after string, limit int) ([]devices.AttestationKey, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var keys []devices.AttestationKey
	for _, serial := range slices.Sorted(maps.Keys(p.Chips)) {
		if serial > after && len(keys) < limit {
			keys = append(keys, p.Chips[serial])
		}
	}
	return keys, p.failure()
}

// RemoveAttestationKey removes a key.
func (p *Ports) RemoveAttestationKey(_ context.Context, serial string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.Chips[serial]
	if err := p.failure(); err != nil || !ok {
		return orNotFound(err)
	}
	delete(p.Chips, serial)
	return nil
}

// Labels returns labels as edits take them.
func Labels(labels map[string]string) map[string]*string {
	edit := map[string]*string{}
	for key, value := range labels {
		edit[key] = &value
	}
	return edit
}
