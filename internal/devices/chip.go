package devices

import "time"

// AttestationKey is one row of the operator's list of chips: the holder of the key is
// the chip with this serial number.
type AttestationKey struct {
	Serial     string
	Device     ID     // the device that it identifies; empty until the first proof
	Sealed     string // the key, encrypted
	ImportedAt time.Time
	BoundAt    time.Time // zero: not bound
}

// Chip is one line of an imported list of chips.
type Chip struct {
	Serial string // as burnt into the chip
	Key    string // eFuse block KEY0, 64 hex digits
	Device string // the device that it identifies; empty: the first device that proves it
}

// Dispute is the reason why a device id is contested.
type Dispute string

// Disputes. The list is complete: every value has a counter.
const (
	DisputeTakeovers Dispute = "fight"        // clients with different Client-Ids take the id over from each other
	DisputeProof     Dispute = "wrong_proof"  // the signature of a listed serial number is wrong
	DisputeSerial    Dispute = "other_device" // the serial number belongs to another device
	DisputeDevice    Dispute = "other_serial" // the device has another serial number
)
