package preflight

// Ref names a stored image.
type Ref struct {
	ID  string // SHA-256, 64 hex digits
	ELF string // by which devices name what they run, 64 hex digits
}

// Judgment is whether a job may give a device an image.
type Judgment struct {
	Verdict   Verdict
	Code      string // of what blocks it; empty: nothing does
	Text      string
	NoWayBack bool // the device could not get back what it runs
	// OtherBoard is whether the image is for other boards, whatever else blocks it.
	OtherBoard bool
}

// Offer is an image as one device could get it.
type Offer struct {
	Judgment
	Ref
	Version string // numbers and dots
	Force   bool   // the device takes it only with force
	Foreign bool   // the program names another server
	Single  bool   // a failed offer restarts the device
	Size    int64  // bytes
	Details string // devices.Details of the last check that was recorded
}
