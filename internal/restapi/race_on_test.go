//go:build race

package restapi

// manyLines is fewer under the race detector, which makes the ports in memory slow.
const manyLines = 1000
