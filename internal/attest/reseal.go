package attest

import (
	"context"
	"fmt"
)

// resealPage is how many keys Reseal reads at once.
const resealPage = 200

// Reseal seals the keys anew that are sealed under an older secret of the fleet, and
// returns how many. It may be called again, also by another node, until there are none.
// A key that cannot be opened stays as it is, and is logged.
func (l *List) Reseal(ctx context.Context) (changed int, err error) {
	for after := ""; ; {
		keys, err := l.keys.AttestationKeys(ctx, after, resealPage)
		if err != nil {
			return changed, fmt.Errorf("seal attestation keys anew: %w", err)
		}
		for _, k := range keys {
			after = k.Serial
			sealed, old, err := l.mint.Reseal(sealPurpose, k.Serial, k.Sealed)
			switch {
			case err != nil:
				l.log.Error("an attestation key cannot be read: it was imported under another --secret; import it again", "serial", k.Serial)
				continue
			case !old:
				continue
			}
			if err := l.keys.ResealAttestationKey(ctx, k.Serial, k.Sealed, sealed); err != nil {
				return changed, fmt.Errorf("seal attestation keys anew: %w", err)
			}
			changed++
		}
		if len(keys) < resealPage {
			return changed, nil
		}
	}
}
