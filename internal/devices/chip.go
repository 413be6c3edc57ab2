package devices

import "time"

// AttestationKey is one row of the operator's list of chips: who signs with the
// key is the chip with this serial number.
type AttestationKey struct {
	Serial     string
	Device     ID     // the device that it proves; empty until the first proof
	Sealed     string // the key, encrypted
	ImportedAt time.Time
	BoundAt    time.Time // zero: not bound
}

// Chip is one line of the operator's list of chips, as it is imported.
type Chip struct {
	Serial string // as burnt into the chip
	Key    string // eFuse block KEY0, 64 hex digits
	Device string // the device that it proves; empty: the first one that it does
}

// Dispute is why a device id is contested.
type Dispute string

// Disputes. The list is closed: every value has a counter.
const (
	DisputeFight  Dispute = "fight"        // clients take the id from each other
	DisputeProof  Dispute = "wrong_proof"  // the signature of a listed serial number is wrong
	DisputeSerial Dispute = "other_device" // the serial number proves another device
	DisputeDevice Dispute = "other_serial" // another serial number proves the device
)
