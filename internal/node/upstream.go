package node

import (
	"time"

	"fleetd/internal/credential"
	"fleetd/internal/devices/speech"
	"fleetd/internal/upstream"
)

// openUpstream makes the bridge to a voice server; nil without one.
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

var (
	upstreamConnections = counter("upstream_connections_total", "Connections to the voice server, by outcome.", "outcome")
	upstreamBad         = counter("upstream_bad_messages_total", "Unusable messages of the voice server, by kind.", "kind")
	upstreamFrames      = counter("upstream_frames_total", "Audio frames carried to and from the voice server.", "direction")
	upstreamDrops       = counter("upstream_dropped_total", "Frames and messages that could not be carried, by reason.", "reason")
	upstreamRequests    = counter("upstream_mcp_requests_total", "MCP requests of the voice server, by outcome.", "outcome")
)

func collectUpstream(b *upstream.Bridge, put func(metric, float64, ...string)) {
	if b == nil {
		return
	}
	b.Connections.Each(func(k upstream.Outcome, n int64) { put(upstreamConnections, float64(n), string(k)) })
	b.BadMessages.Each(func(k upstream.Bad, n int64) { put(upstreamBad, float64(n), string(k)) })
	b.Frames.Each(func(k upstream.Direction, n int64) { put(upstreamFrames, float64(n), string(k)) })
	b.Dropped.Each(func(k upstream.Drop, n int64) { put(upstreamDrops, float64(n), string(k)) })
	b.Requests.Each(func(outcome string, n int64) { put(upstreamRequests, float64(n), outcome) })
}
