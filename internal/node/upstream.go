package node

import (
	"time"

	"fleetd/internal/credential"
	"fleetd/internal/devices/speech"
	"fleetd/internal/upstream"
)

// openUpstream creates the bridge to a voice server; nil without one.
func (n *node) openUpstream() (speech.Voice, error) {
	if n.cfg.VoiceUpstream == "" {
		return nil, nil
	}
	var err error
	n.upstream, err = upstream.New(upstream.Options{URL: n.cfg.VoiceUpstream, Version: n.cfg.Version, Log: n.log,
		Token: func(clientID, device string, now time.Time) string {
			return credential.UpstreamToken(n.cfg.GatewayServerSecret, clientID, device, now)
		}})
	if err != nil {
		return nil, err
	}
	n.onStop(n.upstream.Close)
	return n.upstream, nil
}
