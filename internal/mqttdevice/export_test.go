package mqttdevice

// SetMaxUnknown sets a limit that a test can reach. Call it before Serve.
func (f *Front) SetMaxUnknown(n int32) { f.maxUnknown = n }
