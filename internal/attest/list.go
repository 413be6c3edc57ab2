package attest

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// Import adds chips to the list, all or none. Keys are 64 hex digits; devices may be empty. Errors are
// *devices.Error and contain the serial number, never the key.
func (l *List) Import(ctx context.Context, chips []devices.Chip) error {
	if len(chips) == 0 || len(chips) > MaxImport {
		return bad("an import must have 1 to %d keys, this has %d", MaxImport, len(chips))
	}
	now := clock.Now()
	keys := make([]devices.AttestationKey, 0, len(chips))
	serials, bound := map[string]bool{}, map[devices.ID]bool{}
	for i, c := range chips {
		if err := checkSerial(c.Serial); err != nil {
			return bad("key %d: %v", i+1, err)
		}
		secret, err := hex.DecodeString(c.Key)
		if err != nil || len(secret) != KeySize {
			return bad("serial number %s: a key is %d hex digits, the %d bytes of eFuse block KEY0", c.Serial, hex.EncodedLen(KeySize), KeySize)
		}
		k := devices.AttestationKey{Serial: c.Serial, Sealed: l.mint.Seal(sealPurpose, c.Serial, secret), ImportedAt: now}
		if c.Device != "" {
			if k.Device, err = devices.ParseID(c.Device); err != nil {
				return bad("serial number %s: %v", c.Serial, err)
			}
			k.BoundAt = now
		}
		if serials[k.Serial] || k.Device != "" && bound[k.Device] {
			return bad("serial number %s: it, or its device, is in the import twice; remove one", c.Serial)
		}
		serials[k.Serial], bound[k.Device] = true, true
		keys = append(keys, k)
	}
	if err := l.keys.SaveAttestationKeys(ctx, keys); err != nil {
		if errors.Is(err, devices.ErrBound) {
			return bad("nothing was imported: %v; remove that key first", err)
		}
		return fmt.Errorf("import attestation keys: %w", err)
	}
	l.mu.Lock()
	clear(l.unlisted) // they may be listed now; other nodes look them up again after unlistedFor
	l.mu.Unlock()
	l.log.Info("attestation keys imported", "keys", len(keys))
	return nil
}

// List returns at most limit chips after one, by serial number, without their keys; more reports whether
// there are further ones.
func (l *List) List(ctx context.Context, after string, limit int) (chips []devices.AttestationKey, more bool, err error) {
	chips, err = l.keys.AttestationKeys(ctx, after, limit+1)
	if err != nil {
		return nil, false, fmt.Errorf("list attestation keys: %w", err)
	}
	for i := range chips {
		chips[i].Sealed = ""
	}
	return chips[:min(len(chips), limit)], len(chips) > limit, nil
}

// Remove removes a chip from the list. The device that it admitted stays a member.
func (l *List) Remove(ctx context.Context, serial string) error {
	err := l.keys.RemoveAttestationKey(ctx, serial)
	switch {
	case errors.Is(err, devices.ErrNotFound):
		return &devices.Error{Code: devices.CodeNotFound, Detail: fmt.Sprintf("no key with the serial number %.64q is imported", serial)}
	case err != nil:
		return fmt.Errorf("remove attestation key: %w", err)
	}
	l.log.Info("attestation key removed", "serial", serial)
	return nil
}

func bad(format string, args ...any) error {
	return &devices.Error{Code: devices.CodeBadRequest, Detail: fmt.Sprintf(format, args...)}
}
