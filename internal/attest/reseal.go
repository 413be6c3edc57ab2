package attest

import (
	"context"
	"fmt"
)

// resealPage is how many keys Reseal reads at a time.
const resealPage = 200

// Reseal seals keys with the newest secret that are sealed with an older one, and returns how many. It may be
// called repeatedly and by several nodes, until it returns 0. A key that cannot be opened is logged and not
// changed.
func (l *List) Reseal(ctx context.Context) (changed int, err error) {
	for after := ""; ; {
		keys, err := l.keys.AttestationKeys(ctx, after, resealPage)
		if err != nil {
			return changed, fmt.Errorf("reseal attestation keys: %w", err)
		}
		for _, k := range keys {
			after = k.Serial
			sealed, old, err := l.mint.Reseal(sealPurpose, k.Serial, k.Sealed)
			switch {
			case err != nil:
				l.log.Error("an attestation key cannot be opened: it was imported with another --secret; import it again", "serial", k.Serial)
				continue
			case !old:
				continue
			}
			if err := l.keys.ResealAttestationKey(ctx, k.Serial, k.Sealed, sealed); err != nil {
				return changed, fmt.Errorf("reseal attestation keys: %w", err)
			}
			changed++
		}
		if len(keys) < resealPage {
			return changed, nil
		}
	}
}
