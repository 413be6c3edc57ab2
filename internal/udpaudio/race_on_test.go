//go:build race

package udpaudio

// raceDetector makes sync.Pool drop items at random, so nothing counts allocations.
const raceDetector = true
